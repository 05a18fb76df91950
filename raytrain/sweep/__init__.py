"""A search over recipes: many runs of `fit`, compared, under one run in MLflow."""
