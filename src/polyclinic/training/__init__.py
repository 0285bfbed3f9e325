"""What happens at a site: networks as functions, objectives, the one training loop."""
