"""The data path: requests in, requests out, bytes passed on as they come."""
