"""Trainers of other libraries become jobs: transformers' `Trainer`, and LightningModules."""
