"""What is trained beside a model that stays as it is."""
