"""The train program: a GPT-2 on plain text. Copy `program`, and change it."""
