"""What a training step should need, from the description of the model alone or with a little measured."""
