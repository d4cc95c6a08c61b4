"""ppsmoke: one prompt through a Llama model that is split by layers over machines. See README.md."""

__version__ = "0.1.0"
