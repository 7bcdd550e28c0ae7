"""What changes on a module: the sharding call, the methods of a sharded module, and how its forward reads parameters."""
