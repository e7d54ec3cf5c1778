"""Conversations as training data: encodes lines of JSON as tokens and marks the tokens that the loss counts.

`formats` reads lines, `chat_template` turns them into text (inside `sandbox`), `answers` finds the
assistant's words in the text, and `tokenized` encodes the text and marks the ids that the loss counts.
"""
