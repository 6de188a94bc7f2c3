"""The language model: latent attention, transformer, initialisation, published and own checkpoints."""
