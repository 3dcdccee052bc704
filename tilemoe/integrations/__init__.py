"""tilemoe under other libraries' models. Importing this changes nothing of theirs; each module has its own switch."""
