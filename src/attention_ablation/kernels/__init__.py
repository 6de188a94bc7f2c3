"""Latent attention as one operator: the readable reference and the fast paths beside it."""
