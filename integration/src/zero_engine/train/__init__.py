"""Program that trains a GPT-2 on plain text. Copy `program` as the start of your own."""
