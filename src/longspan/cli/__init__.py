"""The command line: `longspan VERB …`, one file for each verb. The only room that reads flags and the environment."""
