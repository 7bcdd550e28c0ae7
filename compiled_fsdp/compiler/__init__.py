"""The Dynamo backend and what a compile may use: options, hardware, memory, the agreement between ranks."""
