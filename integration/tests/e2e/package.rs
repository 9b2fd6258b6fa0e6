//! The Debian package: its files, and its installation and upgrade on a Debian 12 with systemd.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use integration::guest::{Guest, GuestConfig};
use integration::process;
use integration::progress::print_line;
use integration::provision::debian::{self, DebianRelease};
use integration::provision::host;
use integration::{package, programs};

use crate::Group;
use crate::fixture::{CheckEnvironment, Failure, TIMEOUT, expect, with_path};

pub(crate) const GROUP: Group = Group::Alone {
    name: "package",
    checks: &[
        ("has_its_files", has_its_files),
        ("guests_outlive_its_upgrade", guests_outlive_its_upgrade),
    ],
};

/// Files of the package, apart from manual pages and documents.
const FILES: [&str; 9] = [
    "./etc/nvme-mpt.toml",
    "./usr/bin/nvme-mpt",
    "./usr/lib/systemd/system/nvme-mpt.service",
    "./usr/lib/sysusers.d/nvme-mpt.conf",
    "./usr/lib/udev/rules.d/70-nvme-mpt.rules",
    "./usr/share/bash-completion/completions/nvme-mpt",
    "./usr/share/doc/nvme-mpt/copyright",
    "./usr/share/fish/vendor_completions.d/nvme-mpt.fish",
    "./usr/share/zsh/vendor-completions/_nvme-mpt",
];

fn dpkg_deb(option: &str, package: &Path) -> Result<String, Failure> {
    Ok(process::run(
        Command::new("dpkg-deb").arg(option).arg(package),
    )?)
}

fn has_its_files(bench: &CheckEnvironment) -> Result<(), Failure> {
    let package = package::build(&bench.dir().join("package"), None)?;
    let listing = dpkg_deb("--contents", &package)?;
    let files: BTreeSet<&str> = listing
        .lines()
        .filter_map(|line| line.split_whitespace().last())
        .collect();
    for file in FILES {
        expect(files.contains(file), || {
            format!("{file} is absent:\n{listing}")
        })?;
    }
    let help = process::run(Command::new(bench.program()).arg("-h"))?;
    let (_, commands) = help
        .split_once("Commands:\n")
        .ok_or("No commands in the help")?;
    let commands = commands.lines().take_while(|line| !line.is_empty());
    // Other lines continue a description.
    let entries = commands.filter(|line| !line.starts_with("   "));
    let names = entries.filter_map(|line| line.split_whitespace().next());
    for name in names.filter(|name| *name != "help") {
        let page = format!("./usr/share/man/man1/nvme-mpt-{name}.1.gz");
        expect(files.contains(&*page), || {
            format!("{page} is absent:\n{listing}")
        })?;
    }
    let unpacked = bench.dir().join("unpacked");
    process::run(
        Command::new("dpkg-deb")
            .arg("--extract")
            .arg(&package)
            .arg(&unpacked),
    )?;
    let broken = package::find_broken_links(&unpacked.join("usr/share/doc/nvme-mpt"))?;
    expect(broken.is_empty(), || {
        format!("Links of the documents without a target: {broken:#?}")
    })?;
    let control = bench.dir().join("control");
    process::run(
        Command::new("dpkg-deb")
            .arg("--control")
            .arg(&package)
            .arg(&control),
    )?;
    let read =
        |name: &str| fs::read_to_string(control.join(name)).map_err(with_path(control.join(name)));
    let configuration = read("conffiles")?;
    expect(configuration == "/etc/nvme-mpt.toml\n", || {
        format!("Configuration files: {configuration}")
    })?;
    let (postinst, prerm) = (read("postinst")?, read("prerm")?);
    expect(
        postinst.contains("systemctl reload nvme-mpt.service"),
        || postinst.clone(),
    )?;
    expect(
        !postinst.contains("restart") && !prerm.contains("restart"),
        || format!("The service is restarted by one of these:\n{postinst}\n{prerm}"),
    )
}

/// Boots a Debian 12 with packages in `/mnt`.
fn boot(bench: &CheckEnvironment, packages: &Path) -> Result<Guest, Failure> {
    let disk = bench.dir().join("packages");
    debian::disk(packages, &disk)?;
    let root = debian::provide(DebianRelease::Debian12)?;
    let namespace = |number: u32, image: &Path| {
        let image = image.display();
        [
            "-drive".to_owned(),
            format!("if=none,id=image{number},format=raw,snapshot=on,file={image}"),
            "-device".to_owned(),
            format!("nvme-ns,bus=controller,drive=image{number},nsid={number}"),
        ]
    };
    let controller = [
        "-device".to_owned(),
        "nvme,id=controller,serial=debian".to_owned(),
    ];
    let namespaces = [namespace(1, &root), namespace(2, &disk)].concat();
    let arguments = controller.iter().chain(&namespaces).map(String::as_str);
    let config = GuestConfig::new("debian")
        .vcpus(2)
        .memory_mib(1024)
        .root_on_drive()
        .kernel_arguments("init=/lib/systemd/systemd systemd.show_status=0")
        .qemu_arguments(arguments);
    let guest = Guest::start_booting(&bench.v6_1()?, &config, bench.dir())?;
    guest.await_ready(TIMEOUT)?;
    guest.check("mount -o ro /dev/nvme0n2 /mnt", TIMEOUT)?;
    Ok(guest)
}

/// Returns the process id of the server.
fn main_pid(guest: &Guest) -> Result<String, Failure> {
    let text = guest.check(
        "systemctl show --property MainPID --value nvme-mpt",
        TIMEOUT,
    )?;
    Ok(text.trim().to_owned())
}

/// Waits until `count` servers have become ready, one after the other.
fn await_servers(guest: &Guest, count: usize) -> Result<(), Failure> {
    let script = format!(
        "until [ $(journalctl --unit nvme-mpt --output cat --no-pager | grep --count --line-regexp ready) = {count} ] && \
           systemctl is-active --quiet nvme-mpt; do sleep 0.2; done"
    );
    guest.check(&script, TIMEOUT)?;
    Ok(())
}

/// Checks that the service may not use an image, although its unit and the file modes allow it, until its file has a rule and
/// the service was restarted.
fn uses_files_of_its_rules(guest: &Guest) -> Result<(), Failure> {
    let check = |script: &str| guest.check(script, TIMEOUT);
    check(
        "mkdir --parents /srv/images /etc/systemd/system/nvme-mpt.service.d && \
         truncate --size 64M /srv/images/b.img && chown --recursive nvme-mpt: /srv/images && \
         printf '[Service]\\nReadWritePaths=/srv/images\\n' > /etc/systemd/system/nvme-mpt.service.d/images.conf && \
         systemctl daemon-reload && systemctl restart nvme-mpt",
    )?;
    let log = check("journalctl --unit nvme-mpt --output cat --no-pager")?;
    for line in [
        "Confined by seccomp\n",
        // Landlock version of the kernel of Debian 12.
        "Confined by Landlock 2: files; this kernel does not restrict truncation (Linux 6.2), TCP (Linux 6.7)",
    ] {
        expect(log.contains(line), || format!("It lacks '{line}':\n{log}"))?;
    }
    let add = "nvme-mpt add socket=/run/nvme-mpt/b.sock,path=/srv/images/b.img,id=b";
    let output = check(&format!("! {add} 2>&1"))?;
    for part in [
        "Landlock denies this server /srv/images/b.img (rw)",
        "--landlock-rules path=/srv/images,access=rw",
    ] {
        expect(output.contains(part), || output.clone())?;
    }
    check(
        "printf '[[landlock-rule]]\\npath = \"/srv/images\"\\naccess = \"rw\"\\n' >> /etc/nvme-mpt.toml && \
         kill -9 $(systemctl show --property MainPID --value nvme-mpt)",
    )?;
    check(&format!("until {add}; do sleep 0.2; done"))?;
    check("nvme-mpt remove b")?;
    Ok(())
}

/// Checks that a client continues while the service is reloaded, its package upgraded, and its server killed.
fn guests_outlive_its_upgrade(bench: &CheckEnvironment) -> Result<(), Failure> {
    if !host::is_root() {
        print_line("        NOT CHECKED: package: only root can install a Debian into a folder");
        return Ok(());
    }
    let packages = bench.dir().join("mnt");
    fs::create_dir(&packages).map_err(with_path(&packages))?;
    for (revision, name) in [("1", "first.deb"), ("2", "second.deb")] {
        let version = format!("{}-{revision}", env!("CARGO_PKG_VERSION"));
        let package = package::build(&bench.dir().join("package"), Some(&version))?;
        fs::rename(&package, packages.join(name)).map_err(with_path(&package))?;
    }
    let [load] = &programs::build("nvme-load", &["nvme-load"])?[..] else {
        return Err("One program was built".into());
    };
    fs::copy(load, packages.join("nvme-load")).map_err(with_path(load))?;
    let guest = boot(bench, &packages)?;
    let check = |script: &str| guest.check(script, TIMEOUT);

    check("dpkg --install /mnt/first.deb && systemctl is-active nvme-mpt")?;
    let first = main_pid(&guest)?;
    let status = check(&format!("cat /proc/{first}/status"))?;
    let uid = check("id --user nvme-mpt")?;
    let uid = format!("Uid:\t{}", uid.trim());
    for line in [
        &uid,
        "CapEff:\t0000000000000000",
        "CapBnd:\t0000000000000000",
        "Seccomp:\t2",
    ] {
        expect(status.contains(line), || {
            format!("It lacks '{line}':\n{status}")
        })?;
    }
    check(
        "cd /var/lib/nvme-mpt && truncate --size 64M a.img && chown nvme-mpt: a.img && \
         nvme-mpt add socket=/run/nvme-mpt/a.sock,mode=0660,owner=:kvm,path=a.img,id=a",
    )?;
    let access = check("stat --format '%a %U:%G' /run/nvme-mpt/a.sock")?;
    expect(access.trim() == "660 nvme-mpt:kvm", || access.clone())?;

    // The client keeps one connection until it is told to end.
    let client = guest.start(
        "until [ -e /run/stop ]; do \
           /mnt/nvme-load /run/nvme-mpt/a.sock --verify --interrupts --range 4M --count 2000 --timeout 600 || exit; \
           echo again; \
         done",
    )?;
    check("until nvme-mpt list | grep --quiet connected; do sleep 0.2; done")?;
    let mut servers = vec![first];
    for change in [
        "systemctl reload nvme-mpt",
        "dpkg --install /mnt/second.deb",
        "kill -9 $(systemctl show --property MainPID --value nvme-mpt)",
    ] {
        check(change)?;
        await_servers(&guest, servers.len() + 1)?;
        servers.push(main_pid(&guest)?);
    }
    check("touch /run/stop")?;
    guest.finish_successfully(client, TIMEOUT)?;
    let version = check("dpkg-query --show --showformat '${Version}' nvme-mpt")?;
    expect(version.ends_with("-2"), || version.clone())?;
    let listed = check("nvme-mpt list --json")?;
    expect(listed.contains("\"id\":\"a\""), || listed.clone())?;
    let journal = check("journalctl --unit nvme-mpt --output cat --no-pager")?;
    let different: BTreeSet<&String> = servers.iter().collect();
    expect(different.len() == 4, || {
        format!("Servers {servers:?}:\n{journal}")
    })?;
    expect(!journal.contains("lost"), || format!("Lost:\n{journal}"))?;
    let errors =
        check("journalctl --identifier nvme-mpt --priority err --output cat --no-pager --quiet")?;
    expect(errors.trim().is_empty(), || format!("Errors:\n{errors}"))?;
    let of_function = check("journalctl --unit nvme-mpt FUNCTION=a --output cat --no-pager")?;
    expect(of_function.contains("A client has connected"), || {
        format!("Of the function:\n{of_function}")
    })?;

    uses_files_of_its_rules(&guest)?;
    check("systemctl stop nvme-mpt")?;
    let result = check("systemctl show --property Result --value nvme-mpt; nvme-mpt leases")?;
    expect(result.starts_with("success\nNo leases"), || result.clone())?;
    check("systemctl start nvme-mpt && dpkg --remove nvme-mpt")?;
    check(
        "! systemctl is-active nvme-mpt && ! [ -e /run/nvme-mpt ] && ls /var/lib/nvme-mpt/leases.json",
    )?;
    check("[ -e /etc/nvme-mpt.toml ] && dpkg --purge nvme-mpt && ! [ -e /etc/nvme-mpt.toml ]")?;
    Ok(())
}
