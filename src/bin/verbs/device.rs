//! The calls of libibverbs.
#![allow(unsafe_code, reason = "libibverbs is C; everything unsafe of this program is in this file")]

use std::ffi::{CStr, c_int};
use std::mem::MaybeUninit;
use std::net::Ipv6Addr;
use std::ptr::NonNull;

use dranic::rdma::opened::{Opened, OpenedGid};
use rdma_sys::{
    ibv_alloc_pd, ibv_close_device, ibv_context, ibv_dealloc_pd, ibv_device, ibv_device_attr, ibv_free_device_list,
    ibv_get_device_guid, ibv_get_device_list, ibv_get_device_name, ibv_gid_entry, ibv_open_device, ibv_port_attr,
    ibv_query_device,
};

/// As many GIDs as are asked for; mlx5 has tables of 256.
const GIDS_MAX: usize = 256;

// What C code calls by inline functions of `infiniband/verbs.h` under these names.
unsafe extern "C" {
    fn _ibv_query_gid_table(
        context: *mut ibv_context,
        entries: *mut ibv_gid_entry,
        max: usize,
        flags: u32,
        entry_size: usize,
    ) -> isize;
    // `ibv_query_port` is a macro there; the symbol fills the older part of the structure, which is all that is read here.
    #[link_name = "ibv_query_port"]
    fn query_port(context: *mut ibv_context, port: u8, attributes: *mut ibv_port_attr) -> c_int;
}

/// What did not work.
pub(crate) struct Failure {
    /// What was tried.
    pub(crate) step: &'static str,
    /// The system's error.
    pub(crate) errno: i32,
}

/// After a call that sets `errno`.
fn failed(step: &'static str) -> Failure {
    Failure { step, errno: std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO) }
}

/// A device that is open; it is closed in the end.
pub(crate) struct Device {
    context: NonNull<ibv_context>,
    node_guid: u64,
}

/// The list of libibverbs, freed in the end.
struct List {
    first: NonNull<*mut ibv_device>,
    length: usize,
}

impl List {
    fn get() -> Result<Self, Failure> {
        let mut length: c_int = 0;
        // SAFETY: `length` is written, and outlives the call. The list is freed once, by `drop`.
        let first = unsafe { ibv_get_device_list(&mut length) };
        let first = NonNull::new(first).ok_or_else(|| failed("listing RDMA devices"))?;
        Ok(Self { first, length: usize::try_from(length).unwrap_or(0) })
    }

    fn find(&self, name: &str) -> Option<NonNull<ibv_device>> {
        // SAFETY: the list has `length` entries, by the call that made it, and lives as long as `self`.
        let devices = unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.length) };
        devices.iter().copied().filter_map(NonNull::new).find(|device| {
            // SAFETY: entries of the list are valid until it is freed, and so is the name, a C string in the device.
            let found = unsafe { ibv_get_device_name(device.as_ptr()) };
            // SAFETY: as above.
            !found.is_null() && unsafe { CStr::from_ptr(found) }.to_bytes() == name.as_bytes()
        })
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: it was made by `ibv_get_device_list` and is freed only here. A device that is open does not need it.
        unsafe { ibv_free_device_list(self.first.as_ptr()) }
    }
}

impl Device {
    /// Opens the device called `name`.
    pub(crate) fn open(name: &str) -> Result<Self, Failure> {
        let list = List::get()?;
        let missing = Failure { step: "looking for the device among those of libibverbs", errno: libc::ENODEV };
        let device = list.find(name).ok_or(missing)?;
        // SAFETY: `device` is an entry of `list`, which lives until the end of this function.
        let node_guid = u64::from_be(unsafe { ibv_get_device_guid(device.as_ptr()) });
        // SAFETY: as above. The context is closed once, by `drop`.
        let context = unsafe { ibv_open_device(device.as_ptr()) };
        let context = NonNull::new(context).ok_or_else(|| failed("opening the device"))?;
        Ok(Self { context, node_guid })
    }

    /// Asks for the device, a port of it and its GIDs, and makes a protection domain, as each program begins.
    pub(crate) fn look(&self, port: u8) -> Result<Opened, Failure> {
        self.query_device()?;
        let attributes = self.query_port(port)?;
        let gids = self.gids(port)?;
        self.protection_domain()?;
        Ok(Opened {
            device: String::new(),
            port,
            node_guid: self.node_guid,
            state: u8::try_from(attributes.state).unwrap_or(u8::MAX),
            link_layer: attributes.link_layer,
            gids,
        })
    }

    fn query_device(&self) -> Result<(), Failure> {
        let mut attributes = MaybeUninit::<ibv_device_attr>::zeroed();
        // SAFETY: the context is open, and the structure is large enough by its type.
        let code = unsafe { ibv_query_device(self.context.as_ptr(), attributes.as_mut_ptr()) };
        returned(code, "querying the device")
    }

    fn query_port(&self, port: u8) -> Result<ibv_port_attr, Failure> {
        let mut attributes = MaybeUninit::<ibv_port_attr>::zeroed();
        // SAFETY: the context is open; the function writes no more than the structure has.
        let code = unsafe { query_port(self.context.as_ptr(), port, attributes.as_mut_ptr()) };
        returned(code, "querying the port")?;
        // SAFETY: all of its bytes were set, to zero at least, and it is made of integers.
        Ok(unsafe { attributes.assume_init() })
    }

    fn gids(&self, port: u8) -> Result<Vec<OpenedGid>, Failure> {
        let mut entries: Vec<MaybeUninit<ibv_gid_entry>> = Vec::with_capacity(GIDS_MAX);
        entries.resize_with(GIDS_MAX, MaybeUninit::zeroed);
        let size = size_of::<ibv_gid_entry>();
        // SAFETY: the context is open, and there is room for `GIDS_MAX` entries of `size` bytes.
        let count = unsafe { _ibv_query_gid_table(self.context.as_ptr(), entries.as_mut_ptr().cast(), GIDS_MAX, 0, size) };
        let Ok(count) = usize::try_from(count) else {
            return Err(Failure { step: "reading the GID table", errno: i32::try_from(-count).unwrap_or(libc::EIO) });
        };
        let read = |entry: &MaybeUninit<ibv_gid_entry>| {
            // SAFETY: all of its bytes were set, to zero at least, and it is made of integers and a union of such.
            let entry = unsafe { entry.assume_init_ref() };
            // SAFETY: each of the union's fields is valid for any bytes.
            let raw = unsafe { entry.gid.raw };
            (entry.port_num, OpenedGid { index: entry.gid_index, gid: Ipv6Addr::from(raw), kind: entry.gid_type })
        };
        let all = entries.iter().take(count).map(read);
        Ok(all.filter(|(of, _)| *of == u32::from(port)).map(|(_, gid)| gid).collect())
    }

    fn protection_domain(&self) -> Result<(), Failure> {
        // SAFETY: the context is open.
        let domain = unsafe { ibv_alloc_pd(self.context.as_ptr()) };
        let domain = NonNull::new(domain).ok_or_else(|| failed("making a protection domain"))?;
        // SAFETY: it was made just now, and nothing uses it.
        returned(unsafe { ibv_dealloc_pd(domain.as_ptr()) }, "freeing a protection domain")
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: it was opened by `open`, is closed only here, and nothing that was made with it is left.
        unsafe { ibv_close_device(self.context.as_ptr()) };
    }
}

/// Of functions that return an error's number.
fn returned(code: c_int, step: &'static str) -> Result<(), Failure> {
    if code == 0 { Ok(()) } else { Err(Failure { step, errno: code.abs() }) }
}
