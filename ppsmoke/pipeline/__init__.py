"""The messages between stages, the actor that handles them, and the bridge to its worker process."""
