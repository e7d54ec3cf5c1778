"""Conversations as training data: which tokens a line of JSON becomes, and which of them the loss counts.

`formats` reads lines of the forms that people have. `chat_template` makes text of a conversation by the
model's own template, which is a stranger's program and so runs inside `sandbox`. `answers` finds in that text
what the assistant says, and `tokenized` makes ids of it, with a mark on each that counts.
"""
