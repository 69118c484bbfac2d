"""Run folders as objects, and predictors: images in, answers out."""
