"""Parts of a cluster's router: instances, requests, dispatch, roles, counts."""
