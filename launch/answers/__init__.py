"""Parts of launch.generate and launch.chat: what an answer needs."""
