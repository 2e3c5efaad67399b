"""Tiny random models of the study, by field. Importing a module adds its models to the registry."""
