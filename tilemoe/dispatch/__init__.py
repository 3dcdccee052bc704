"""Dispatch and combine: send tokens to the processes that hold their experts, and bring the outputs back."""
