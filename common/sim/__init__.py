"""Virtual time: a model of the servers, of the network and of traffic, for the policies to run in."""
