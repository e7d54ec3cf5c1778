"""Conversations as training data: the tokens that a line of JSON becomes, and which of them the loss counts.

`formats` reads lines, `chat_template` turns them into text (inside `sandbox`), `answers` finds the
assistant's words in it, and `tokenized` encodes it and marks the ids that count.
"""
