"""Edits a graph whose attentions are all recognised: the op, packed tokens, rows of logits."""
