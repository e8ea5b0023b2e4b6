"""Images and videos of a row: where its texts name them, and the placeholders that stand for them among its tokens."""
