//! A double of the kubelet's plugin manager and DRA client.
