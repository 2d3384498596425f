"""Text, tokens and chats."""
