"""What can be trained, by `training.trainable`."""
