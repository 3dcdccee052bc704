"""The command line: ``tilemoe train | eval | generate | export``."""
