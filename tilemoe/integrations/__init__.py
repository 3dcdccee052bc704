"""tilemoe inside other libraries' models. Importing this changes none of them; each module has its own switch."""
