"""What outputs and targets mean, one file for each task."""
