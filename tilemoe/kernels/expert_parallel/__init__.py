"""What prepares tokens to be sent between ranks."""
