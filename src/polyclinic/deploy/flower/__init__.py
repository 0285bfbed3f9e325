"""The connection between server and sites over Flower."""
