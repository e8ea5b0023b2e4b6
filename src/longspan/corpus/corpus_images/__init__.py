"""Images of a corpus as steps take them: documents that say where each stands, and what reads their pixels."""
