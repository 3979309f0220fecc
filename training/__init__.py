"""The recipe of the embedded model: corpus, tokenizer, training, baseline and evaluation."""
