"""Run folders as objects, and predictors, which answer for images."""
