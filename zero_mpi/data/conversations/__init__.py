"""Conversations as training data: the tokens that a line of JSON becomes, and which of them the loss counts.

`formats` reads lines in the common forms. `chat_template` turns a conversation into text by the model's own
template, which is untrusted code and so runs inside `sandbox`. `answers` finds the assistant's words in that
text, and `tokenized` encodes the text and marks the ids that count.
"""
