"""meshllm: the computers you already own as one machine for running language models."""

__version__ = "0.1.0"
