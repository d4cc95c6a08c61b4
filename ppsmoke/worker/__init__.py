"""The computing child: GGUF, tokenizer, model slice, JSON loop. The only room that imports tinygrad or numpy."""
