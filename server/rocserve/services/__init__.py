"""What the server can be asked, free of any transport: messages in, messages out."""
