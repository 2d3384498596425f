"""Chats and preferences as documents to train on."""
