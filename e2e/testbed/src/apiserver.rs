//! A double of the API server: ResourceSlices, ResourceClaims, Nodes, Pods over plain HTTP.
