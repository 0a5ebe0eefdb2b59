"""Learning-rate schedules with warm-up."""
