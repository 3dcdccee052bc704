"""Where a layer's tokens meet its experts: in this process, or in the process that holds them."""
