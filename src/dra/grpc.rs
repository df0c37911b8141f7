//! The sockets the kubelet talks to: registration, and DRA v1 and v1beta1.
