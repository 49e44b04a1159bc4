"""The scripts are run by `adopt`, not imported."""

collect_ignore = ["scripts"]
