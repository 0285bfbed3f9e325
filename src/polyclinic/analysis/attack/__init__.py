"""Attacks that reconstruct images from intercepted features or gradients."""
