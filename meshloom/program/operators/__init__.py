"""Operators that programs call besides ATen: collectives, and layers of which every rank has a part."""
