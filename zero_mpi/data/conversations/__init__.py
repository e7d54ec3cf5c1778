"""Conversations as training data: turns a line of JSON into tokens and marks the tokens of the loss.

`formats` reads lines, `chat_template` turns them into text (inside `sandbox`), `answers` finds the
assistant's words in the text, and `tokenized` encodes the text and marks the ids that the loss counts.
"""
