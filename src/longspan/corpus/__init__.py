"""From files of text, rows, chats and images to a folder of arrays that steps read."""
