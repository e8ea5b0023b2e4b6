"""From a row of data to the tokens of a document, and which of them are targets."""
