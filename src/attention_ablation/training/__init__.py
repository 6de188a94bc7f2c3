"""Training of one run: schedule, DeepSpeed engine, loop, autosave."""
