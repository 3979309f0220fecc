"""What a model will take and do on a machine, before it is deployed there."""
